"""What tests share: programs, players of what is not there, and processes."""
