"""The client against reference engines in other processes, under one kind of trouble each."""
