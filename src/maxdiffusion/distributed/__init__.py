"""Jobs of several processes: initialisation, coordination, watchdog and preemption."""
