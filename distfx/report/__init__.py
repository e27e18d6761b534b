"""What was planned and what was sent: plan rows, predicted bytes, the ledger, the printed graph."""
