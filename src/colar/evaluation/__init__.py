"""From a checkpoint to records, from records to a report."""
