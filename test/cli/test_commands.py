"""Every command of ``canopy`` declares its options; a mistyped one gets a useful error."""

import pytest

from canopy_lab.cli.main import COMMANDS, main, parser_of


def test_the_number_of_commands_is_bounded():
    assert len({name.split()[0] for name in COMMANDS}) <= 13


@pytest.mark.parametrize("name", COMMANDS)
def test_each_declares_its_options(name):
    parser_of(name)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "give a command"),
        (["documents"], "did you mean documents calibrate?"),
        (["serve-me"], "unknown command 'serve-me'"),
    ],
)
def test_an_unknown_command_is_answered_with_the_known_ones(argv, says, capsys):
    with pytest.raises(SystemExit) as end:
        main(argv)
    assert end.value.code == 2
    assert says in capsys.readouterr().err
