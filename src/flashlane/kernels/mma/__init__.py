"""The mma.sync family: sm_80 and up."""
