"""What a model's keys and values look like, and what every way of quantizing them costs: KIVI's section 3, repeated."""
