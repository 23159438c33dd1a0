"""``rollout-operator``, and ``python -m rollout_operator``."""

from rollout_pod.first_process import end_by_sigterm


def main() -> None:
    """Run the operator until it is told to stop."""
    end_by_sigterm()
    from rollout_operator import cli  # takes its time

    cli.main()


if __name__ == "__main__":
    main()
