"""Named scenarios: each tells a story in its docstring, and fails as not exercised when the story did not happen."""
