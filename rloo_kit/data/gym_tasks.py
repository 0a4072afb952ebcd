"""Which tasks of reasoning-gym 0.1.25 are offered: those whose verifier scores the stored answer 1 and nonsense 0.

Measured on 60 rows of each task (`benchmarks/results/gym_tasks.json`); `tests/data/test_gym_tasks.py` scores those
that are offered again.
"""

import difflib

from rloo_kit.config.checks import GYM_PREFIX
from rloo_kit.errors import DataError

SOUND: tuple[str, ...] = (
    "ab",
    "acre",
    "aiw",
    "arc_1d",
    "base_conversion",
    "basic_arithmetic",
    "bf",
    "binary_alternation",
    "bitwise_arithmetic",
    "caesar_cipher",
    "chain_sum",
    "circuit_logic",
    "count_bits",
    "count_primes",
    "course_schedule",
    "cryptarithm",
    "decimal_arithmetic",
    "decimal_chain_sum",
    "dice",
    "family_relationships",
    "gcd",
    "isomorphic_strings",
    "kakurasu",
    "largest_island",
    "lcm",
    "leg_counting",
    "letter_counting",
    "list_functions",
    "mahjong_puzzle",
    "manipulate_matrix",
    "maze",
    "modulo_grid",
    "needle_haystack",
    "number_filtering",
    "number_format",
    "number_sequence",
    "number_sorting",
    "palindrome_partitioning",
    "path_star",
    "products",
    "quantum_lock",
    "ransom_note",
    "rotate_matrix",
    "rotten_oranges",
    "self_reference",
    "shortest_path",
    "simple_equations",
    "simple_geometry",
    "sokoban",
    "string_manipulation",
    "string_splitting",
    "string_synthesis",
    "survo",
    "syllogism",
    "word_ladder",
    "word_sequence_reversal",
    "zebra_puzzles",
)
REFUSED: dict[str, str] = {
    "advanced_geometry": "its verifier gives 0.05 to nonsense (a number)",
    "arc_agi": "its stored answer scores 0.05",
    "binary_matrix": "its verifier runs the answer as Python",
    "boxnet": "the stored answer is None",
    "calendar_arithmetic": "its verifier gives 0.63 to nonsense (a constant: `10`)",
    "codeio": "its verifier gives 0.01 to nonsense (a constant: `{}`)",
    "coin_flip": "its verifier gives 1 to nonsense (a constant: `0`)",
    "color_cube_rotation": "its verifier gives 0.01 to nonsense (empty)",
    "complex_arithmetic": "its verifier gives 1 to nonsense (a constant: `nan`)",
    "composite": "Must specify at least one dataset",
    "countdown": "its verifier runs the answer as Python",
    "emoji_mystery": "its verifier gives 0.01 to nonsense (empty)",
    "figlet_font": "its verifier gives 0.4 to nonsense (the question)",
    "fraction_simplification": "its verifier gives 0.05 to nonsense (a constant: `1/2`)",
    "futoshiki": "its verifier gives 0.075 to nonsense (a negative number)",
    "game_of_life": "its verifier raises KeyError on a constant",
    "game_of_life_halting": "its verifier gives 1 to nonsense (white space)",
    "graph_color": "the stored answer is None",
    "group_anagrams": "its verifier gives 0.01 to nonsense (a constant: `[]`)",
    "gsm_symbolic": "Object of type Fraction is not JSON serializable",
    "intermediate_integration": "its verifier runs the answer as Python",
    "jugs": "its verifier gives 0.01 to nonsense (a constant: `[]`)",
    "knight_swap": "its verifier gives 0.05 to nonsense (a constant: `[]`)",
    "knights_knaves": "its verifier gives 0.65 to nonsense (the question)",
    "letter_jumble": "its verifier gives 0.14 to nonsense (the question)",
    "mini_sudoku": "its verifier gives 0.056 to nonsense (a negative number)",
    "n_queens": "its verifier runs the answer as Python",
    "palindrome_generation": "its verifier gives 0.05 to nonsense (white space)",
    "polynomial_equations": "its verifier gives 0.88 to nonsense (a constant: `-1`)",
    "polynomial_multiplication": "its verifier runs the answer as Python",
    "pool_matrix": "its verifier gives 0.1 to nonsense (a constant: `0 0`)",
    "power_function": "its verifier gives 0.01 to nonsense (empty)",
    "prime_factorization": "its verifier raises ValueError on random words",
    "propositional_logic": "the stored answer is None",
    "puzzle24": "its verifier runs the answer as Python",
    "rearc": "its stored answer scores 0.05",
    "rectangle_count": "its verifier gives 0.64 to nonsense (a constant: `2`)",
    "rubiks_cube": "the stored answer is None",
    "rush_hour": "the stored answer is None",
    "sentence_reordering": "its verifier gives 0.05 to nonsense (empty)",
    "simple_integration": "its verifier runs the answer as Python",
    "spell_backward": "its verifier gives 0.43 to nonsense (the question)",
    "spiral_matrix": "its verifier runs the answer as Python",
    "string_insertion": "its verifier runs the answer as Python",
    "sudoku": "its verifier gives 0.033 to nonsense (a number)",
    "time_intervals": "its verifier gives 1 to nonsense (a constant: `0:00`)",
    "tower_of_hanoi": "its verifier gives 0.05 to nonsense (white space)",
    "tsumego": "its verifier gives 0.01 to nonsense (white space)",
    "word_sorting": "its verifier gives 0.17 to nonsense (the question)",
}


def check_task(task: str, key: str) -> None:
    """Raise DataError for a task that does not exist or is refused; `key` names it in the configuration."""
    if task in SOUND:
        return
    if task in REFUSED:
        raise DataError(
            f"{key}: {GYM_PREFIX}{task} is refused: {REFUSED[task]}. docs/data.md lists the tasks; {_nearest(task)}"
        )
    raise DataError(f"{key}: reasoning-gym has no task '{task}'; {_nearest(task)}. docs/data.md lists those refused")


def _nearest(task: str) -> str:
    found = difflib.get_close_matches(task, SOUND, n=3, cutoff=0.4)
    return f"the nearest: {', '.join(found)}" if found else f"there are {', '.join(SOUND)}"
