"""`study virtual`: what one rank of N would hold and send, without the other N-1."""
