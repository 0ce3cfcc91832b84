"""What happens in a training step: counting it, reading its optimizer, handing its tables to the writer."""
