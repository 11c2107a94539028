"""What memory, traffic and time should be, from first principles and data sheets. Free of torch."""
