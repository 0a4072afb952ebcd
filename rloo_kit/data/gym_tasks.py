"""Which tasks of reasoning-gym 0.1.25 are offered: those whose verifier gives its stored answer 1 and nonsense 0.

Measured by `python benchmarks/gym_tasks.py`, which writes the two lists; each of the others has its reason.
"""

import difflib

from rloo_kit.config.checks import GYM_PREFIX
from rloo_kit.errors import DataError

# begin: written by benchmarks/gym_tasks.py --write-table
SOUND: tuple[str, ...] = (
    "ab",
    "acre",
    "aiw",
    "arc_1d",
    "base_conversion",
    "basic_arithmetic",
    "bf",
    "binary_alternation",
    "binary_matrix",
    "bitwise_arithmetic",
    "caesar_cipher",
    "calendar_arithmetic",
    "chain_sum",
    "circuit_logic",
    "coin_flip",
    "complex_arithmetic",
    "count_bits",
    "count_primes",
    "course_schedule",
    "cryptarithm",
    "decimal_arithmetic",
    "decimal_chain_sum",
    "dice",
    "family_relationships",
    "game_of_life",
    "gcd",
    "group_anagrams",
    "intermediate_integration",
    "isomorphic_strings",
    "jugs",
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
    "n_queens",
    "needle_haystack",
    "number_filtering",
    "number_format",
    "number_sequence",
    "number_sorting",
    "palindrome_partitioning",
    "path_star",
    "polynomial_equations",
    "polynomial_multiplication",
    "products",
    "quantum_lock",
    "ransom_note",
    "rectangle_count",
    "rotate_matrix",
    "rotten_oranges",
    "self_reference",
    "shortest_path",
    "simple_equations",
    "simple_geometry",
    "simple_integration",
    "spiral_matrix",
    "string_insertion",
    "string_manipulation",
    "string_splitting",
    "string_synthesis",
    "sudoku",
    "survo",
    "syllogism",
    "time_intervals",
    "word_ladder",
    "word_sequence_reversal",
    "zebra_puzzles",
)
REFUSED: dict[str, str] = {
    "advanced_geometry": "its verifier gives 0.05 to nonsense (a number)",
    "arc_agi": "its stored answer scores 0.05",
    "boxnet": "the stored answer is None",
    "codeio": "its verifier gives 0.01 to nonsense (the question)",
    "color_cube_rotation": "its verifier gives 0.01 to nonsense (empty)",
    "composite": "Must specify at least one dataset",
    "countdown": "its verifier gives 0.05 to nonsense (a number)",
    "emoji_mystery": "its verifier gives 0.01 to nonsense (empty)",
    "figlet_font": "its verifier gives 0.4 to nonsense (the question)",
    "fraction_simplification": "its verifier gives 0.01 to nonsense (empty)",
    "futoshiki": "its verifier gives 0.072 to nonsense (a number)",
    "game_of_life_halting": "its verifier gives 1 to nonsense (white space)",
    "graph_color": "the stored answer is None",
    "gsm_symbolic": "Object of type Fraction is not JSON serializable",
    "knight_swap": "too slow to draw (0.4 s a row)",
    "knights_knaves": "its verifier gives 0.65 to nonsense (the question)",
    "letter_jumble": "its verifier gives 0.14 to nonsense (the question)",
    "mini_sudoku": "its verifier gives 0.027 to nonsense (the question)",
    "palindrome_generation": "its verifier gives 0.05 to nonsense (white space)",
    "pool_matrix": "its verifier gives 0.1 to nonsense (a number)",
    "power_function": "its verifier gives 0.01 to nonsense (empty)",
    "prime_factorization": "its verifier raises ValueError on random words",
    "propositional_logic": "the stored answer is None",
    "puzzle24": "its verifier gives 0.01 to nonsense (empty)",
    "rearc": "its stored answer scores 0.05",
    "rubiks_cube": "the stored answer is None",
    "rush_hour": "the stored answer is None",
    "sentence_reordering": "its verifier gives 0.05 to nonsense (empty)",
    "sokoban": "too slow to draw (0.17 s a row)",
    "spell_backward": "its verifier gives 0.43 to nonsense (the question)",
    "tower_of_hanoi": "its verifier gives 0.05 to nonsense (white space)",
    "tsumego": "its verifier gives 0.01 to nonsense (white space)",
    "word_sorting": "its verifier gives 0.17 to nonsense (the question)",
}
# end


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
