"""What the command line refuses or warns about before Hydra sees it (case 18)."""

import pytest
from hydra.errors import HydraException

from clusterft.overrides import UserError, check_command_line, one_sentence, spelled_out


def test_scale_before_experiment_is_refused():
    with pytest.raises(UserError, match="after"):
        check_command_line(["+scale=laptop", "+experiment=table2"])
    check_command_line(["+experiment=table2", "+scale=laptop"])


def test_a_comma_outside_a_sweep_shows_the_three_spellings():
    with pytest.raises(UserError) as caught:
        check_command_line(["data.path=a.jsonl,b.jsonl"])
    for spelling in ("-m data.path=a.jsonl,b.jsonl", "data.path=[a.jsonl,b.jsonl]", "data.path=a.jsonl\\,b.jsonl"):
        assert spelling in str(caught.value)


@pytest.mark.parametrize(
    "argument", ["data.path='a,b.jsonl'", "data.path=[a.jsonl,b.jsonl]", "data.path=/x/my\\,set.jsonl", "cell=range(0,4)"]
)
def test_lists_quotes_and_escapes_are_meant(argument, capsys):
    check_command_line([argument])
    assert capsys.readouterr().err == ""


def test_a_sweep_over_data_files_warns(capsys):
    check_command_line(["-m", "data.path=a.jsonl,b.jsonl"])
    assert "sweep over 2 files" in capsys.readouterr().err
    check_command_line(["-m", "selector.ratio=0.5,1.0"])
    assert capsys.readouterr().err == ""


def test_a_value_that_is_named_twice_warns(capsys):
    check_command_line(["-m", "seed=1,2,1"])
    assert capsys.readouterr().err == "warning: seed=1,2,1 names 1 more than once; equal runs are one run\n"


def test_hydras_pages_become_sentences():
    wrong = HydraException("Error merging override cell=abc")
    wrong.__cause__ = ValueError("Value 'abc' of type 'str' could not be converted to Integer\n    full_key: cell")
    assert one_sentence(wrong) == "cell=abc: Value 'abc' of type 'str' could not be converted to Integer"
    assert "must be added with a plus: +scale=..." in one_sentence(HydraException("Could not override 'scale'.\nKey ..."))
    twice = HydraException("Multiple values for scale. To override a value use 'override scale: laptop'")
    assert one_sentence(twice) == "Multiple values for scale: give it once"


def test_a_seed_with_a_leading_zero_is_a_text():
    with pytest.raises(UserError, match="write seed=7"):
        check_command_line(["seed=007"])


def test_a_launcher_without_multirun_is_refused():
    with pytest.raises(UserError, match="-m"):
        check_command_line(["hydra/launcher=submitit_slurm"])
    check_command_line(["-m", "hydra/launcher=submitit_slurm"])


def test_options_stand_for_overrides():
    assert spelled_out(["+experiment=table2", "--check", "seed=1"]) == ["+experiment=table2", "check=true", "seed=1"]
    assert spelled_out(["--render", "+experiment=table2"]) == ["render=true", "+experiment=table2"]
    given = ["+scale=laptop", "--explain", "table2", "CluSTER r=1.00", "avg", "--plan"]
    assert spelled_out(given) == ["+experiment=table2", "+scale=laptop", 'explain=["CluSTER r=1.00","avg"]', "plan=true"]
    check_command_line(spelled_out(given))
    assert spelled_out(["-m", "seed=0,1", "--cfg", "job"]) == ["-m", "seed=0,1", "--cfg", "job"]


def test_an_explain_without_its_words_shows_how_it_is_written():
    for words in (["table2"], ["table2", "CluSTER r=1.00"], ["table2", "CluSTER r=1.00", "+scale=laptop"]):
        with pytest.raises(UserError, match="--explain table2"):
            spelled_out(["--explain", *words])


@pytest.mark.parametrize("argument", ["+zzz=1", "+trainer.lerning_rate=1", "++trainer.epochs=1", "+seed=1"])
def test_nothing_is_added_that_nothing_reads(argument):
    with pytest.raises(UserError, match="would add a setting that nothing reads"):
        check_command_line([argument])


def test_groups_and_hydras_own_settings_are_added():
    check_command_line(["+experiment=table2", "+scale=laptop", "+hydra.verbose=true"])
