"""Problems as text: sources, the generator and the judge."""
