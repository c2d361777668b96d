"""What people and programs read: machine facts, tables, pictures."""
