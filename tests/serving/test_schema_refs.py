from serving.schema_refs import moved


def test_references_of_a_schema_that_moves_stay_right():
    schema = {"properties": {"a": {"$ref": "#/$defs/A"}, "b": {"items": [{"$ref": "#"}]}}, "$defs": {"A": {"const": 1}}}
    assert moved(schema, "t") == {
        "properties": {"a": {"$ref": "#/$defs/t/$defs/A"}, "b": {"items": [{"$ref": "#/$defs/t"}]}},
        "$defs": {"A": {"const": 1}},
    }


def test_a_value_that_is_called_like_a_reference_stays_as_it_is():
    assert moved({"enum": ["#"], "const": {"$ref": 3}}, "t") == {"enum": ["#"], "const": {"$ref": 3}}
