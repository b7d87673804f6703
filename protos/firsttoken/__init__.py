"""What other services install: the contract's generated code, and `firsttoken.client`."""
