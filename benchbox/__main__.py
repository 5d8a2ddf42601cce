"""`python -m benchbox`: the same as the command `benchbox`."""

from benchbox.cli.app import main

if __name__ == "__main__":
    main()
