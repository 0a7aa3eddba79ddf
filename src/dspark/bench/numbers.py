"""Lists of whole numbers as the benchmarks' options write them."""

from dspark.config.errors import DSparkError


def whole_numbers(option: str, text: str) -> tuple[int, ...]:
    """ "1,4,16" as numbers, in the order given.

    Raises:
        DSparkError: an entry is no whole number above 0.
    """
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise DSparkError(f"{option} is {text!r}: give whole numbers above 0 with commas between them, such as 1,4,16")
    return numbers
