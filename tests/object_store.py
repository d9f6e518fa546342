"""A real S3 server on loopback, and a proxy in front of it that puts in faults."""

import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import boto3

START_S = 60
SERVE = """
import sys
from moto.moto_server.threaded_moto_server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print(server._server.server_port, flush=True)
sys.stdin.read()  # until the test process ends
"""
KEYS = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing"}


@contextmanager
def s3_server():
    """The port of a server in a process of its own."""
    command = [sys.executable, "-c", SERVE]
    with subprocess.Popen(command, stdin=-1, stdout=-1, stderr=subprocess.DEVNULL) as process:
        timer = threading.Timer(START_S, process.kill)
        timer.start()
        try:
            line = process.stdout.readline()
            timer.cancel()
            yield int(line)
        finally:
            timer.cancel()
            process.kill()


class Proxy(ThreadingHTTPServer):
    """Passes requests on to the server, but for the faults of `faults`, first ones first.

    A fault is (what, times): "503", "cut" in the middle of a body, or seconds of delay. It befalls
    requests of objects (GET), and with `methods` others.
    """

    daemon_threads = True

    def __init__(self, server_port):
        super().__init__(("127.0.0.1", 0), Handler)
        self.to_port, self.lock = server_port, threading.Lock()
        self.clear()

    def clear(self):
        self.faults, self.methods, self.requests, self.at_get = [], {"GET"}, Counter(), None
        self.bytes_sent = 0

    def fault(self, method):
        """The fault of the next request; None without one."""
        with self.lock:
            self.requests[method] += 1
            if method not in self.methods or not self.faults:
                return None
            (kind, times), *later = self.faults
            self.faults = [(kind, times - 1), *later] if times > 1 else later
            return kind


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def pass_on(self):
        length = int(self.headers.get("Content-Length", 0))
        body, proxy = self.rfile.read(length), self.server
        if self.command == "GET" and proxy.at_get is not None:
            action, proxy.at_get = proxy.at_get, None
            action()
        fault = proxy.fault(self.command)
        if isinstance(fault, float):
            time.sleep(fault)
        if fault == "503":
            self.send_response(503, "Slow Down")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        server = HTTPConnection("127.0.0.1", proxy.to_port, timeout=60)
        server.request(self.command, self.path, body, dict(self.headers))
        answer = server.getresponse()
        content = answer.read()
        self.send_response(answer.status, answer.reason)
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "connection", "date", "server"):
                self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content[: len(content) // 2] if fault == "cut" else content)
        proxy.bytes_sent += len(content)
        self.close_connection = fault == "cut"
        server.close()

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = pass_on

    def log_message(self, *_):
        pass


class ObjectStore:
    """The bucket `bucket` of a server, behind a proxy."""

    def __init__(self, server_port, proxy):
        self.port, self.proxy = server_port, proxy
        self.url = f"http://127.0.0.1:{proxy.server_port}"
        self.client = boto3.client(
            "s3",
            endpoint_url=f"http://127.0.0.1:{server_port}",
            region_name="us-east-1",
            aws_access_key_id="testing",
            aws_secret_access_key="testing",
        )
        self.client.create_bucket(Bucket="bucket")

    def put(self, name, content):
        self.client.put_object(Bucket="bucket", Key=name, Body=content)
        return f"s3://bucket/{name}"

    def put_files(self, folder, paths):
        return [self.put(f"{folder}/{path.name}", path.read_bytes()) for path in paths]

    def check_rights(self, are_checked):
        """Let the server check the rights of requests, or not."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("POST", "/moto-api/reset-auth", b"0" if are_checked else b"inf")
        assert connection.getresponse().status == 200


@contextmanager
def object_store():
    with s3_server() as port, Proxy(port) as proxy:
        thread = threading.Thread(target=proxy.serve_forever, daemon=True)
        thread.start()
        try:
            yield ObjectStore(port, proxy)
        finally:
            proxy.shutdown()
            thread.join(60)
