"""Names and words that were replaced by the field's standard terms are not used again."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import typer

from edgeinfer_tui.command_list import app

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("quant_formats", "kernels", "offload", "edgeinfer", "tui", "benchmarks", "tests")
BANNED = frozenset(
    """
    ACTIVATIONS_A_BLOCK BlockFormat DividedRow ModelFacts SCALE_FIELDS ScriptedChoice WIDENED changing_rows
    contestants divided_rows stand_in supers weave_high_bytes weave_high_shorts weave_low_bytes
    weave_low_shorts AnswerClock AnswerCounts AnswerGroup Ask Branches BranchesInTurn COLUMNS_A_PIECE
    CatalogueEntry CatalogueError CertainTokens ChangingLayer ChoiceScreen ChoosingBackend Chosen
    Contestant DeviceChoice DeviceChoices DeviceHalf EmbeddingAsk Ends ExpertRefills ExpertSlots
    FLOATS_A_PROGRAM FirstOf ForgettingBackend GuessLoop Guesses GuessingBackend GuessingEngine Habits
    HostHalf LOGITS_A_PART LayerDivision Learnt LlamaCppContestant LosableTerminal Mailbox MailboxRows
    Manner ModelPlacing NEURONS_A_BLOCK OBJECTS_A_COLLECTION OPERATIONS_A_BYTE OUTPUTS_A_TILE OneByOne
    OwnContestant PAGES_A_TILE PIECES_A_STEP PIECES_A_THREAD POSITIONS_A_PAGE POSITIONS_A_PIECE
    POSITIONS_A_TILE Pace PagedBranches Patience Placing PlacingBackend PlanFacts PlanWishes Programs
    PromptTurns ROWS_A_GROUP ROWS_A_PAIR ROWS_A_TILE ReferenceIndex RememberedFigures ReturnedRows
    RunWishes SCORES_A_THREAD SendingHost Sent SentLayers SentMatrix ServingWishes Sliding SlidingEngine
    SlotPolicy SparseWish StepTurns StoredTurn Team TextRelease TimedTeam TokenChoice Transformer TurnView
    TurnWriter TypeWishes WORTH_A_THREAD Wanted WeightSender Wishes check_wishes host_turns most_waiting
    penalised rope_halves rows_alike run_wishes send_from turning_point vouched_by whole_layer_first
    why_not best_answers branches_of can_vote further_chances all_stood leaf_taken
    least_chances least_wanted manner_of most_given pace_of read_by_some_layers slid_at _earned_tokens
    ChatForm Dialogue KeptConversation OnFull RunningAnswer SamplerSettings TalkScreen TextForm add_turn
    begin_turn draft_leaves on_full option_sets sampler_options settings_again stored_turn
    Recall Said dropped_turns dropped_turns_line left_out_tokens note_use own_catalogue patience _patience
    read_catalogue tokens_per_pass vouched with_closed_thought without_thought
    MAX_PLACES TOLD_TOKENS told_by asked_for asked_by _facts_of facts_path TensorFacts FileFacts QuantChoice
    SparseChoice most_tokens last_asked answer_again on_message_view_asked _most_waiting _user_turns
    _remarks draft_notes form_warnings wanted_bytes chosen_on used_experts least_kv
    units_label unit_name units_per_token unit_counts unit_matrices units_device_bytes has_units
    unit_neurons units_on_gpu _unit_items _add_units on_placed OnPlaced refill_experts REFILL_BYTES
    REFILL_COPIES refill_bytes most_used DrawSettings RejectedTrialError Trials TRIALS BlockFacts
    pairs_seen pairs_here pair_rows group_pairs_kernel GROUPED_PAIRS pair_slots count_pairs pairs_of
    _pair_input to_half read_half half_bytes half_of_power SMALLEST_HALF SMALLEST_NORMAL_HALF
    at_least_half low_half high_half hadamard_of_halves _both_halves _widen_half _narrow_to_half
    least_gpu_bytes least_context least_tokens Placed _overlapped_side SIDES DraftCall draft_call _call_of
    _fill_calls _drawn_from CHOSEN PATIENCE _most_spills _is_cut bytes_of_half next_halves add_half
    most_rows refills device_half
    CUDA_FACTS MANNERS MIXTURES WISHES Knowing SlidingFake Thinker chosen_by choose_best draw_three
    experts_used facts_of figures_there guesser host_half in_mid_answer is_person
    mixture_model wanted_chances wanted_of write_mixture
    """.split()  # noqa: SIM905
)
BANNED_FLAGS = frozenset(
    ("--answers", "--draft-leaves", "--lines", "--on-full", "--reference", "--references", "--slide")
)
BANNED_COMMANDS = frozenset(("chats",))
BANNED_PREFIXES = ("MOST_", "LEAST_")
BANNED_SPELLING = ("quantis", "normalis", "optimis", "initialis", "synchronis")
BANNED_PROSE = """
    afresh, anew, anybody, asked, behaviours?, behind, beside, catalogues?, colours?, everybody, forgot(ten)?,
    goes on, gone on, hand-overs?, heard, hears?, in (its|their) (place|stead), in place of, looks? back,
    looking back, meanwhile, mixtures?(?! of experts), mood, neighbours?, nobody, of (his|its|their) own,
    outgrows?, outgrew, remarks?, remarked, said, slides?, slid, so many, somebody, stood, stretches, told,
    turning point, votes?, whoever, wished, wishes,
    (de|re)?(initiali|normali|optimi|quanti|synchroni)s(e[ds]?|ing|ation)
    """
"""Words of comments, docstrings and Markdown that the field has other words for; patterns of `re`."""
BANNED_IN_TEST_NAMES = """
    afresh, anew, answer(s|ed)?, asked, asks, behaviours?, behind, beside, catalogue, chances?,
    choices?, chooses, chosen, colours?, drawn?, draws, forgets, forgotten, goes_on, gone,
    guess(es|ed)?, halves, hand_over, heard, hears?, in_place_of, knows, lies?, lives?, meanwhile,
    misspelt, mixtures?, neighbours?, nobody, notes?, (of|on)_(its|their)_own, outgrows?, remarks?,
    remarked, responded_to, said, says_so, slides?, slid, so_many, somebody, speaks, stands?, stood,
    stretches, takes?_turns, told, tells?, turns?, votes?, wanted, wants?, whoever, wished, wishes
"""
"""The same for the names of tests."""
QUOTING_PAGES = frozenset(("ATTRIBUTION.md",))
"""Pages that list titles of other authors."""
ALLOWED_IN_TEST_NAMES = re.compile("_end_of_turn(?=_|$)")
"""The name of a control token."""


def alternatives(patterns: str) -> str:
    """One pattern of a comma-separated list; without groups, so that `findall` gives whole words."""
    return "|".join(each.strip() for each in patterns.replace("(", "(?:").replace("(?:?!", "(?!").split(","))


BANNED_WORDS = re.compile(rf"\b(?:{alternatives(BANNED_PROSE)})\b", re.IGNORECASE)
NAME = re.compile(r"[^\W\d]\w*")
BANNED_TEST_WORDS = re.compile(rf"_(?:{alternatives(BANNED_IN_TEST_NAMES)})(?=_|$)")


@cache
def is_banned(name: str) -> bool:
    """Whether a name has a better one."""
    return (
        name in BANNED
        or name.lstrip("_").startswith(BANNED_PREFIXES)
        or any(spelling in name.lower() for spelling in BANNED_SPELLING)
    )


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_banned_name_is_used(folder: str) -> None:
    result = set()
    for path in (ROOT / folder).rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if not any(map(is_banned, set(NAME.findall(text)))):
            continue  # Otherwise only names of the code count.
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.NAME and is_banned(token.string):
                result.add(f"{path.relative_to(ROOT)}:{token.start[0]}: {token.string}")
    assert not result


def docstring_lines(module: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, text) of every string that is a statement: docstrings of modules, functions and attributes."""
    for node in ast.walk(module):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield from enumerate(text.splitlines(), node.lineno)


def prose_lines(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of comments and docstrings, or of a page without its code; none without a banned word."""
    text = path.read_text(encoding="utf-8")
    if not BANNED_WORDS.search(text):
        return
    if path.suffix == ".py":
        if any(BANNED_WORDS.search(line.partition("#")[2]) for line in text.splitlines() if "#" in line):
            tokens = tokenize.generate_tokens(io.StringIO(text).readline)
            yield from ((token.start[0], token.string) for token in tokens if token.type == tokenize.COMMENT)
        yield from docstring_lines(ast.parse(text))
        return
    is_code = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif not is_code:
            yield number, line


def banned_prose(line: str) -> list[str]:
    """The banned words of a line outside of its code spans and quotations."""
    return BANNED_WORDS.findall(re.sub(r"``?[^`]*``?|\"[^\"]*\"|“[^”]*”", "", line))


def is_banned_test_name(name: str) -> bool:
    """Whether a test's name has a word that another one replaces."""
    return bool(BANNED_TEST_WORDS.search(ALLOWED_IN_TEST_NAMES.sub("", name)))


@pytest.mark.parametrize("folder", [*FOLDERS, "docs", "examples", "."])
def test_no_banned_word_is_in_prose(folder: str) -> None:
    root = ROOT / folder
    pages = root.glob("*.md") if folder == "." else (*root.rglob("*.py"), *root.rglob("*.md"))
    result = [
        f"{path.relative_to(ROOT)}:{number}: {', '.join(words)}"
        for path in sorted(pages)
        if "data" not in path.relative_to(root).parts and path.name not in QUOTING_PAGES
        for number, line in prose_lines(path)
        if (words := banned_prose(line))
    ]
    assert result == []


def test_a_banned_word_is_found_in_prose() -> None:
    assert banned_prose("# Meanwhile nobody reads it.") == ["Meanwhile", "nobody"]
    assert banned_prose("dequantised") == ["dequantised"]
    assert banned_prose("a mixture") == ["mixture"]
    assert banned_prose('a mixture of experts; `adjacent_profile_path`; the message "nobody"') == []


def test_no_test_has_a_banned_name() -> None:
    result = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(
            r"^ *(?:async )?def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE
        )
        if is_banned_test_name(name)
    ]
    assert result == []


def test_a_banned_test_name_is_found() -> None:
    assert is_banned_test_name("test_a_text_that_slid")
    assert is_banned_test_name("test_a_full_disk_is_told_before_writing")
    assert not is_banned_test_name("test_end_of_turn_is_recognized")
    assert not is_banned_test_name("test_returned_logits_are_unchanged")


def test_a_banned_name_is_found() -> None:
    assert is_banned("MOST_TOKENS")
    assert is_banned("_LEAST_CONTEXT")
    assert is_banned("dequantised")
    assert is_banned("HostHalf")
    assert not is_banned("MAX_TOKENS")


def test_no_command_has_a_banned_name_or_option() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    flags = {flag for command in commands.values() for param in command.params for flag in param.opts}
    assert "--context-overflow" in flags
    assert not BANNED_FLAGS & flags
    assert not BANNED_COMMANDS & set(commands)
