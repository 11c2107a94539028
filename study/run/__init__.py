"""What stands around every training loop: one run opened, checked, recorded and closed."""
