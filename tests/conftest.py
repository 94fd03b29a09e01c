"""One thread for all tests, set before torch is loaded: equalities to the bit hold for one thread count, and ranks have one thread each."""

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
