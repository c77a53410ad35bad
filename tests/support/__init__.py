"""The test kit (models of time, chance, disks and processes). Nothing in here stands in for a part of agentctl."""
