"""Running a split model: its backend, the expert cache policy, activity profiles."""
