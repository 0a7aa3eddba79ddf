"""`python -m dspark`: the console script, where it is not on the path."""

from dspark.cli import main

if __name__ == "__main__":
    main()
