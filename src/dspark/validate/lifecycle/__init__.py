"""The lifecycle validator: engines under schedules that nobody would choose, against each request decoded alone."""
