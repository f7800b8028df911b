"""python -m agent_r1.cli"""

from agent_r1.cli.app import main

if __name__ == "__main__":
    main()
