"""How requests become batches: queues, their policies, the dispatcher, resources of instances."""
