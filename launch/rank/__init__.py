"""What a rank is: how it comes up, its groups and sizes, its step loop and its own processes."""
