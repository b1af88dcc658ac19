"""``python -m flashlane``."""

from flashlane.cli.entry import main

if __name__ == "__main__":
    main()
