"""From a prepared batch to a changed policy: columns, drivers, the optimizer."""
