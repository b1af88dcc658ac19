"""Head dims above 128 with the same bits at every run: dK and dV in one kernel, dQ in another."""
