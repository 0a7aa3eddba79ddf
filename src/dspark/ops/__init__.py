"""Operations of the model: each file owns one op, its contract and its plain torch twin."""
