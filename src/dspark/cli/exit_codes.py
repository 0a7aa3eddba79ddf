"""What a command returns to the shell."""

FAILED = 1  # a check or a comparison did not hold, or the output could not be written
REFUSED = 2  # the user's input was refused; one sentence on stderr says why
INTERRUPTED = 130  # Ctrl-C, as shells report it
