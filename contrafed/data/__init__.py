"""Images, partitions and availability: the part that all data sets, partitioners and patterns share."""
