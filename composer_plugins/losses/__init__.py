"""What a loss is: its row, where it is registered, how it is chosen by name, how it is called."""
