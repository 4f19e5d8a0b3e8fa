"""Requests that schemathesis makes from the OpenAPI document never break a promise of it."""

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings

from tests.serving.stand_in import StandIn

HOST = "testserver"  # as schemathesis calls it
pytestmark = pytest.mark.slow
CHECKS = [
    schemathesis.checks.not_a_server_error,
    schemathesis.checks.status_code_conformance,
    schemathesis.checks.content_type_conformance,
    schemathesis.checks.response_schema_conformance,
]
OPERATIONS = (
    *(("POST", "/v1/videos"), ("GET", "/v1/videos")),
    *(("GET", "/v1/videos/{identifier}"), ("DELETE", "/v1/videos/{identifier}")),
    ("GET", "/v1/videos/{identifier}/content"),
    ("POST", "/v1/videos/{identifier}/cancel"),
    ("POST", "/v1/videos/{identifier}/remix"),
    *(("GET", "/v1/models"), ("GET", "/livez"), ("GET", "/readyz")),
)


@pytest.fixture(scope="module")
def schema(tmp_path_factory):
    server = StandIn(tmp_path_factory.mktemp("openapi"), serve_allowed_hosts=[HOST])
    yield schemathesis.openapi.from_asgi("/openapi.json", server.app)
    server.stop()


def test_every_operation_is_tried(schema):
    found = {(one.ok().method.upper(), one.ok().path) for one in schema.get_all_operations()}
    assert found == set(OPERATIONS)


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_answers_fit_the_document(schema, method, path):
    operation = schema[path][method]

    @given(case=operation.as_strategy())
    @settings(
        max_examples=15,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    def check(case):
        case.call_and_validate(checks=CHECKS)

    check()
