"""Communication: transports, launchers, process groups, agreement between ranks, failure reports."""
