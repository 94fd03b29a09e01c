"""CluSTER: choose a balanced subset of instruction data, fine-tune on it in parallel, see that nothing was lost."""

__version__ = "0.1.0"
