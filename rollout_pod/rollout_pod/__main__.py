"""``rollout-pod``, and ``python -m rollout_pod``."""

from rollout_pod.first_process import end_by_sigterm


def main() -> None:
    """Run the command line."""
    end_by_sigterm()
    from rollout_pod import cli  # takes its time

    cli.main()


if __name__ == "__main__":
    main()
