"""Lists of whole numbers as the benchmarks' options write them."""

from dspark.config.errors import DSparkError

_MOST = 10**9  # above every number of requests and tokens that means something


def whole_numbers(option: str, text: str) -> tuple[int, ...]:
    """ "1,4,16" as numbers, in the order given.

    Raises:
        DSparkError: an entry is no whole number, or none that counts something.
    """
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1 or max(numbers) > _MOST:
        raise DSparkError(
            f"{option} is {text!r}: give whole numbers from 1 to {_MOST} with commas between them, such as 1,4,16"
        )
    return numbers
