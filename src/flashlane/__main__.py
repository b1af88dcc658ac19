"""``python -m flashlane``."""

from flashlane.cli import main

if __name__ == "__main__":
    main()
