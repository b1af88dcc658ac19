"""Commands of ``flashlane``, one module each."""
