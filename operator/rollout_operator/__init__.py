"""The operator: makes RolloutReplicas true, one asyncio worker each."""
