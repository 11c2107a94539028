"""`study virtual`: memory and communication of one rank of N, without the other N-1."""
