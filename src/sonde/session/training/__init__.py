"""Parts of a training step: counting it, reading its optimizer, and passing its tables to the writer."""
