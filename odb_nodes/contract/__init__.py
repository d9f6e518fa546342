"""What every node is: its state, its epochs, and what a graph of them can be asked."""
