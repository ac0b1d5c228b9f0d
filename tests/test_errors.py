"""What a message may look like."""

from dflash_trt.errors import Failure, UserError


def test_a_message_says_what_where_and_fix():
    error = UserError("block_size is 1", where="draft/config.json", fix="use at least 2")
    assert str(error) == "block_size is 1 — draft/config.json — use at least 2"
    assert (error.exit_code, Failure("no room").exit_code) == (2, 1)


def test_unprintable_characters_from_a_checkpoint_do_not_reach_the_terminal():
    assert str(UserError("name \x1b[31mred\ud800 é")) == "name \\x1b[31mred\\ud800 é"
