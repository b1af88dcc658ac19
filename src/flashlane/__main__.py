"""``python -m flashlane``."""

from flashlane.cli.main import main

if __name__ == "__main__":
    main()
