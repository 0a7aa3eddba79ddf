"""Assembly of whole models from plans: config parsing, the decoder, the draft."""
