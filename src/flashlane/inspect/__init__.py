"""What the machine and the compiler say: doctor, budgets, shared-memory layouts."""
