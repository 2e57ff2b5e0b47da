"""Pass tensors between the ranks of one host, which compute on processors, through shared memory."""
