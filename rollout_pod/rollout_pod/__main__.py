"""``python -m rollout_pod``."""

from rollout_pod.cli import main

if __name__ == "__main__":
    main()
